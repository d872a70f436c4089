"""The server's loop of a script, `xain.session()`, and many participants on one machine,
`xain.simulate()`. The only distribution that imports both coordinator and participant."""
