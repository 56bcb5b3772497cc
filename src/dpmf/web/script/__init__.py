"""The script that Streamlit runs, in its own directory because Streamlit puts that on the import path."""
