/* Connections from other hosts of which nobody knows yet whose they are: who is heard, who waits,
 * who is hung up on. Each that is heard has a thread and a descriptor for as long as it may take to
 * prove who it is, so there are so many places and no more, and one address has no more than its
 * share: a stranger that takes what it gets leaves places to all others.
 *
 * Happy path: strangers_come() takes a connection; strangers_next() names those that may be heard;
 * strangers_gone() gives a place back. No I/O, no clock. Any thread. */
#ifndef SHD_RELAY_STRANGERS_H
#define SHD_RELAY_STRANGERS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#define STRANGERS_HEARD   256u /* at a time */
#define STRANGERS_OF_ONE  64u  /* of these, of one address */
#define STRANGERS_WAITING 1024u
#define STRANGERS_WAITING_OF_ONE \
    448u /* a host's workers may come at once; with those that are heard half of all that wait */

struct stranger_source { /* IPv4 as IPv6 has it; of IPv6 the network: a host may have all of it */
    uint8_t bytes[16];
};

struct stranger {
    struct stranger_source source;
    int fd; /* owned by whoever has the stranger */
};

struct strangers {
    pthread_mutex_t lock;
    uint32_t heard, waiting;
    struct stranger_source sources[STRANGERS_HEARD]; /* [heard], in any order */
    struct stranger queue[STRANGERS_WAITING + 1]; /* [waiting]; one more if it is heard at once */
};

void strangers_init(struct strangers *s);

struct stranger_source stranger_source(const struct sockaddr *address);

/* It waits for its turn. False: its address has as many as it may, or nobody finds room; it is the
 * caller's to hang up on. */
bool strangers_come(struct strangers *s, const struct stranger *who);

/* Whoever has waited longest of those that may be heard; from now on it is. False: nobody. */
bool strangers_next(struct strangers *s, struct stranger *ret_who);

/* One of that address that was heard is known, or gone. */
void strangers_gone(struct strangers *s, struct stranger_source source);

/* Nobody more can be taken, of whatever address. */
bool strangers_are_crowded(struct strangers *s);

bool strangers_wait(struct strangers *s); /* somebody does */

#endif
