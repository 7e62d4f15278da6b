"""The Flower ClientApp: what runs where the interactions are."""
