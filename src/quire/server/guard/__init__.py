"""Who may ask, whose cache it is, and whether there is room in the queue."""
