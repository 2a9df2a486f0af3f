"""Bytes in, bytes out: bodies read and checked, errors in a client's own form, event streams."""
