"""Bridges to other libraries. Each module imports its library; nothing here is imported by ``import dpmf``."""
