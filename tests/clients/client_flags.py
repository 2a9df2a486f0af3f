"""What each client's script is told: which server, by which key, and what its model is called.

The scripts run in environments of their own, so this imports nothing that is not Python's.
"""

import argparse


def client_flags(*, names_model: bool = True) -> argparse.ArgumentParser:
    """``names_model``: else the script asks the server what it has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    if names_model:
        parser.add_argument("--model", default="demo")
    return parser
