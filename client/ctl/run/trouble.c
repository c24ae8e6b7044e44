/* See trouble.h. */
#include "client/ctl/run/trouble.h"

#include <stdio.h>

#include "client/ctl/base/say.h"
#include "proto/base/clock.h"

#define SAY_EACH 8u /* tries that are said one by one; then once in SAY_NS */
#define SAY_NS   (60 * NS_PER_S)

bool trouble_state_is_kept(const struct run *r)
{
    for (uint32_t i = 0; i < r->daemons.count; i++)
        if (r->daemons.list[i].kept.count > 0)
            return true;
    return false;
}

static void note_all(const struct run *r)
{
    static char text[DOWN_NOTE_FILE_BYTES_MAX]; /* one thread */
    size_t used = 0;
    for (uint32_t i = 0; i < r->daemons.count; i++) {
        const struct run_child *c = &r->daemons.list[i];
        if (c->down.since_ns > 0)
            used = down_note_add(text, sizeof text, used, c->name, &c->down);
    }
    down_note_write(r->down_fd, text, used);
}

void trouble_begin(struct run_child *c, const char *why, uint64_t wait_ms)
{
    const uint64_t now_ns = clock_now_ns();
    char text[DOWN_NOTE_BYTES];
    if (c->down.since_ns == 0)
        c->down = (struct down_note){ .since_ns = now_ns };
    c->down.tries++;
    c->down.kept = c->kept.count;
    c->down.next_ns = now_ns + wait_ms * NS_PER_MS;
    snprintf(c->down.why, sizeof(c->down.why), "%s", why);
    note_all(c->run);
    if (c->down.tries < SAY_EACH) {
        ctl_say("%s", why);
    } else if (c->down.tries == SAY_EACH || now_ns - c->said_ns >= SAY_NS) {
        c->said_ns = now_ns;
        ctl_say("%s", down_note_text(&c->down, now_ns, text));
    }
}

void trouble_try(struct run_child *c)
{
    if (c->down.since_ns == 0 || c->down.next_ns == 0)
        return;
    c->down.next_ns = 0;
    note_all(c->run);
}

void trouble_end(struct run_child *c)
{
    if (c->down.since_ns == 0)
        return;
    c->down = (struct down_note){ 0 };
    note_all(c->run);
}
