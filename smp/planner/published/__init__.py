"""Published runs of other trainers, what the planner's formula says of them, and how far that is off."""
