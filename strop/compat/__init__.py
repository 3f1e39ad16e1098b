"""For people who come from elsewhere: their scripts, their functions, and losses under the names they know."""
