"""Decides which experts go to the device, in which groups and capacities. Knows no device and no model code."""
