"""Reading of files as people have them: sources, dialects, columns, rows, values, details of items and users."""
