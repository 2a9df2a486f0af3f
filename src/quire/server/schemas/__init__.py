"""Requests and answers as structs: what msgspec checks, encodes, and describes in OpenAPI."""
