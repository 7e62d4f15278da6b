"""What a person reads about several runs."""
