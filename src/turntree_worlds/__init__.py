"""The built-in worlds: household games, questions with tools, shell tasks and bugs, their policies and experts.

They come through entry points, like those of any other package: the library `turntree` imports none of them.
"""
