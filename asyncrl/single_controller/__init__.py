"""single_controller."""
