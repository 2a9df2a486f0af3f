"""Responses that outlive their connection: those that are kept, and those that run without one."""
