"""The controller: what a run starts, drives and stops. It sees metadata only."""
