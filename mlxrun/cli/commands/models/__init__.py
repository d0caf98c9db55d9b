"""Commands about models: what they are, and which are in the local cache of the hub."""
