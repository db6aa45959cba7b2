"""Transports that move messages of weights from trainer ranks to engine ranks. Each defines its own flow control."""
