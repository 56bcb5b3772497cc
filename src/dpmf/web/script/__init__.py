"""The script that Streamlit runs, in a directory of its own: Streamlit puts that directory first on the import path."""
