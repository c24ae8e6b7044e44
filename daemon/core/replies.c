/* See replies.h. One entry per number of the window, at number % REPLIES_WINDOW. The frames are
 * apart and not cleared: a session that asks for little has pages of few of them. */
#include "daemon/core/replies.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"

enum entry_state { ENTRY_PENDING = 1, ENTRY_KEPT, ENTRY_TOO_LONG };

struct entry {
    uint64_t seq; /* 0: never used */
    enum entry_state state;
    uint32_t bytes; /* of its frame */
};

struct replies {
    uint64_t highest;
    struct entry entry[REPLIES_WINDOW];
    uint8_t (*frame)[REPLIES_BYTES_MAX]; /* owned, [REPLIES_WINDOW] */
};

int replies_new(struct replies **ret_replies, struct shd_err *e)
{
    struct replies *r = calloc(1, sizeof *r);
    if (r != NULL)
        r->frame = malloc(REPLIES_WINDOW * sizeof *r->frame);
    if (r == NULL || r->frame == NULL) {
        replies_free(r);
        return err_set(e, SHD_ENOMEM, "%zu bytes for the replies of a session",
                       sizeof *r + REPLIES_WINDOW * sizeof *r->frame);
    }
    *ret_replies = r;
    return SHD_OK;
}

void replies_free(struct replies *r)
{
    if (r == NULL)
        return;
    free(r->frame);
    free(r);
}

static struct entry *entry_of(struct replies *r, uint64_t seq)
{
    return &r->entry[seq % REPLIES_WINDOW];
}

enum replies_verdict replies_take(struct replies *r, uint64_t seq, const void **ret_frame,
                                  size_t *ret_bytes)
{
    CHECK(seq > 0);
    if (seq < r->highest && r->highest - seq >= REPLIES_WINDOW)
        return REPLIES_OLD;
    if (seq > r->highest)
        r->highest = seq;
    struct entry *en = entry_of(r, seq);
    if (en->seq != seq) {
        en->seq = seq;
        en->state = ENTRY_PENDING;
        return REPLIES_NEW;
    }
    switch (en->state) {
    case ENTRY_PENDING:
        return REPLIES_PENDING;
    case ENTRY_TOO_LONG:
        en->state = ENTRY_PENDING; /* until it is answered again */
        return REPLIES_SERVE;
    case ENTRY_KEPT:
        break;
    }
    *ret_frame = r->frame[en - r->entry];
    *ret_bytes = en->bytes;
    return REPLIES_AGAIN;
}

void replies_keep(struct replies *r, uint64_t seq, const void *frame, size_t bytes)
{
    struct entry *en = entry_of(r, seq);
    if (en->seq != seq || en->state != ENTRY_PENDING)
        return;
    en->state = bytes > REPLIES_BYTES_MAX ? ENTRY_TOO_LONG : ENTRY_KEPT;
    if (en->state == ENTRY_TOO_LONG)
        return;
    memcpy(r->frame[en - r->entry], frame, bytes);
    en->bytes = (uint32_t)bytes;
}
