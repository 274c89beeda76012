"""Word lists of the guessing game, from SCOWL; see NOTICE, and make_words.py for how."""
