"""What a model will cost, answered before buying, by the code that serves. Imports no torch."""
