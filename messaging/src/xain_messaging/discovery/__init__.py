"""Ways to find each other: see ports.Discovery."""

from xain_membership.ports import Discovery


def open_discovery(target: str) -> Discovery:
    """Make a discovery at "HOST:PORT" of a coordinator, or at "redis://HOST:PORT/DB"."""
    # Imported when asked for: neither needs what the other does.
    if target.startswith(("redis://", "rediss://", "unix://")):
        from xain_messaging.discovery.redis import RedisDiscovery

        return RedisDiscovery(target)
    from xain_membership.coordinator import CoordinatorDiscovery

    return CoordinatorDiscovery(target)
