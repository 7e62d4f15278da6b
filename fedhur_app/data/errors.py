"""The one error type of the data code."""


class DataError(ValueError):
    """Input data cannot be used; the text says what is wrong, where, and what to do.

    The text never holds a user or item id or a row: it names files, lines and columns instead.
    """
