"""A model and its updates, divided among the processes of a trainer."""
