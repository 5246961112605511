"""What watches communication: the log of `trace_comm`, and debug mode, in which ranks compare before they communicate.

In the order of imports, which go down only:

    communication  `Communication`: one that is about to happen, as logs record it and ranks compare it
    meeting        `Session`: ranks tell each other, through the job's store, what they are about to communicate
    log            `Log`, `Record`: what was communicated
    debug          the comparison of the ranks before a communication, in debug mode
    watched        `trace_comm`, `debug_mode`, and the transport around another that tells both of every communication
"""
