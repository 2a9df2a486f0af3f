"""What the scheduler is made of: each module decides one thing, and none of them knows a tensor."""
