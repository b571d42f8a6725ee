"""Where the figures of steps are sent, and the spans of requests: to trackers and collectors."""
