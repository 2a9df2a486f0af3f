"""One module a route: what is asked, run, and said."""
