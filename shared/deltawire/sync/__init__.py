"""Publish and follow: the two verbs of the product.

publisher.py  diff -> encode -> upload -> commit, with fencing and anchor cadence
reader.py     run.json and latest.json, configuration and tokenizer, without torch
follower.py   latest.json -> route -> fetch and verify, for an engine to stage
Only this room knows both bytes and tensors; the services, the TRL drop-in and anyone's own training
loop use it alike.
"""
