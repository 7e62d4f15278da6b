"""FedHUR's mathematics, one idea a file: plain tensors in, plain tensors out."""
