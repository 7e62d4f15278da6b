"""FeCoSR's mathematics: a table of the items that markets agree on, and how each market is pulled to it."""
