"""Local recommenders, how one client trains them, and how its user vectors are refitted for ranking."""
