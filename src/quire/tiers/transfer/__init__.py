"""Records that one server leaves for another: leases, a small protocol, and both of its ends."""
