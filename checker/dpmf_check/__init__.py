"""An independent checker of dpmf's certificates (docs/certificates.md says what is proved and what is assumed)."""
