/* What the fuzz target of relays (relay.c) has in place of other hosts and daemons: relay_far.c
 * stands for daemon/relay/bulk.c, attach.c and thread.c, so that all that is behind them runs
 * without sockets, TLS and waits.
 *
 * A connection of the thread that runs the input asks the target for its next step where it would
 * receive; and now and then in the middle of what it sends, as a full socket makes the real one.
 * Mirrors have a thread each, which waits for frames and has taken one when far_tell_mirror()
 * returns. */
#ifndef SHD_TESTS_FUZZ_RELAY_H
#define SHD_TESTS_FUZZ_RELAY_H

#include "daemon/relay/bulk.h"
#include "daemon/relay/zconn.h"
#include "proto/share/fdpass.h"
#include "proto/wire/wire.h"
#include "tests/fuzz/fuzz.h"

#define FAR_MIRRORS_MAX 12u
#define FAR_BYTES_MAX   ((uint64_t)1 << 20) /* of a segment or a message that is not absurd */

struct far_frame {
    struct bulk_head head;
    uint8_t payload[2048]; /* its beginning; behind it zeros */
};

struct far_script {
    /* One step; SHD_EGONE: the input is over. */
    int (*turn)(struct bulk *bulk, struct shd_err *e);
    /* The relay has sent a frame, not as a mirror. */
    void (*sent)(const struct bulk_head *head, const void *payload);
};

/* The daemon beside the relay: its ends, of the session that is open. */
struct far_daemon {
    struct zconn z;
    int side;
};
extern struct far_daemon far_daemon;

/* Once for each input: from here on, and until every thread has ended. */
void far_begin(const struct far_script *script);
void far_end(void);

/* So many turns come in the middle of what is sent next; not said in the middle of it. */
void far_interrupt(unsigned turns);

/* A frame comes, as it would by the wire. */
int far_deliver(struct bulk *bulk, const struct far_frame *frame, struct shd_err *e);

/* The index-th mirror of this input takes a frame; nothing where there is none, or none any more.
 */
void far_tell_mirror(unsigned index, const struct far_frame *frame);

/* -- relay_steps.c ----------------------------------------------------------------------------- */

#define RELAY_SPECS     2u
#define RELAY_KNOWN_MAX 64u

extern const char *const relay_specs[RELAY_SPECS];
extern struct shardmap *relay_maps[RELAY_SPECS]; /* of owner 0 of 1 */

/* Of an input. */
struct relay_now {
    struct fuzz_in in;
    bool beside;
    unsigned steps;
    struct zconn worker;
    int side;
    struct side_msg welcome; /* that the worker got last; type 0: none */
    uint64_t seq;
    struct {
        uint64_t number, bytes;
    } known[RELAY_KNOWN_MAX]; /* segments that were announced */
    uint32_t known_count;
    uint64_t last_number;
    int layouts; /* that the worker was not told yet */
};
extern struct relay_now relay_now;

/* Bits of a byte that says which layout. */
enum layout_bits {
    LAYOUT_SPEC = 1,
    LAYOUT_INBOX = 2,
    LAYOUT_APART = 4, /* the spec is in a segment */
    LAYOUT_SMALL = 8, /* publish is said smaller than it is */
    LAYOUT_OTHER = 16,
};

/* One step each, of relay_now.in: an error ended the connection. */
int relay_step_in_stead(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e);
int relay_step_beside(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e);

/* The worker asks. */
void relay_ask(struct wire_request *request);

#endif
