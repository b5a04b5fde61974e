"""Bridges to other libraries; each is imported by name, and none at import of attnbias."""
