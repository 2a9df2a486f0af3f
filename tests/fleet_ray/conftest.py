"""What is here needs Ray (``make test-fleet``), and is not looked at without it."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
