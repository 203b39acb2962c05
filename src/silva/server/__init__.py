"""HTTP servers around Silva's parts: how one listens, who may ask what, and the inference server's routes."""
