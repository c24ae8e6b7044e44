/* The manager's side of the fd store protocol, small, as systemd does it: a process of its own,
 * forked before the test has threads, that starts the daemons, holds what they store, and gives it
 * to their successors. The test tells it what to do over a socket and waits for the answer. */
#ifndef SHD_TESTS_KEEPER_H
#define SHD_TESTS_KEEPER_H

#include "proto/base/check.h"

enum keeper_order {
    KEEPER_START,  /* a daemon, with all that is stored. text: its SHARDD_FAIL; "A;B;C": that of the
                    * n-th start, for it is started again whenever it dies. number: its pid */
    KEEPER_KILL,   /* it, with SIGKILL. number: its status */
    KEEPER_WAIT,   /* until it has ended by itself. number: its status */
    KEEPER_TERM,   /* it, in good order, for good. number: its status */
    KEEPER_STARTS, /* number: how often it was started */
    KEEPER_COUNT,  /* number: of stored descriptors */
    KEEPER_GIVE,   /* a copy of the first stored one whose name ends in text */
    KEEPER_FORGET, /* the one whose name ends in text */
    KEEPER_SAID,   /* number: of messages with a line that begins like text */
};

/* Start the manager; returns the socket to talk to it. serve(index) runs a daemon and exits. */
int keeper_new(const char *dir, int count, void (*serve)(int index), pid_t *ret_pid);

/* Tell it something; returns the answer's number. ret_fd: NULL, or where GIVE's goes. */
long keeper_ask(int control, enum keeper_order order, int index, const char *text, int *ret_fd);

#endif
