"""Several engines behind one address: which one a request goes to, and why."""
