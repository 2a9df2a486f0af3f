"""A fleet on Ray Serve: the only package that knows Ray.

Serve starts a process a replica, finds places for them, replaces what dies and scales. Ours are
``ServedReplica``, an engine in such a process; ``ChosenReplica``, which makes Serve send a call
where the fleet's placement wants it; ``RayReplicas``, which are there, as the door sees it; and
``start_fleet``, which has Serve start them. ``build`` makes the application of Serve's config file.
"""

from typing import Final

from quire.errors import ConfigError

RAY_VERSION: Final = "2.60"  # its routers are alpha: another minor version may differ
_EXTRA = "pip install 'quire-kv[fleet]'"

try:
    import ray.serve  # what ray[serve] brings beside ray, too
except ImportError as error:
    raise ConfigError(
        f"a fleet runs on Ray Serve, which is not here ({error}): {_EXTRA}"
    ) from error
if not ray.__version__.startswith(f"{RAY_VERSION}."):
    raise ConfigError(
        f"ray {ray.__version__} is here, and a fleet needs {RAY_VERSION}.x: what it uses of Serve "
        f"(request routers, autoscaling policies) changes between versions: {_EXTRA}"
    )

from quire.fleet.ray_serve.serve_file import build  # noqa: E402  only now: it needs Ray

__all__ = ["RAY_VERSION", "build"]
