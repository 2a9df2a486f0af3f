"""What serving will cost, answered before it is bought, by the code that serves. No torch here."""
