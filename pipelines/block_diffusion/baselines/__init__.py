"""Other recipes, on the same masks, scorer and evaluator."""
