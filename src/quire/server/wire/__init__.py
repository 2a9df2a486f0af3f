"""Bytes in and out: bodies checked, errors in a client's own form, event streams."""
