"""The shared core of ddp-pitfalls: run one variant of one script on several ranks, and judge what every rank says."""
