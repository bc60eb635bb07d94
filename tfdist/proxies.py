"""Keeps the proxies that a user has set from standing between the tasks: gRPC asks one even for this host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

VARIABLES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")


def exceptions(environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Returns no_proxy, NO_PROXY and no_grpc_proxy with these hosts (and loopback) added; nothing without a proxy.

    gRPC reads `no_grpc_proxy` and, only where that is not set, `no_proxy`.

    Example:
        >>> exceptions({"http_proxy": "http://proxy:1", "no_proxy": "a.org"}, ["n08"])["no_grpc_proxy"]
        'a.org,n08,127.0.0.1,localhost,::1'
    """
    if not any(environ.get(name) or environ.get(name.upper()) for name in VARIABLES):
        return {}
    changed = {}
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        before = environ.get(name) or environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        names = [part.strip() for part in before.split(",") if part.strip()]
        added = [host for host in dict.fromkeys([*hosts, "127.0.0.1", "localhost", "::1"]) if host not in names]
        changed[name] = ",".join([*names, *added])
    return changed
