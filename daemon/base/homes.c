/* See homes.h. */
#include "daemon/base/homes.h"

#include <stdlib.h>

#include "daemon/base/log.h"
#include "daemon/base/pager.h"
#include "proto/base/sys.h"
#include "proto/share/segment_file.h"

#define STATE     "--state"
#define PUBLISH   "--publish"
#define SNAPSHOTS "--snapshots"

struct homes {
    struct segment_home state, publish, snapshots;
    struct pager *pager; /* owned */
};

static int parse(const char *flag, const char *word, struct segment_home *ret_home,
                 struct shd_err *e)
{
    return segment_home_parse(flag, word != NULL ? word : "memory", ret_home, e);
}

int homes_new(const struct homes_words *words, struct homes **ret_homes, struct shd_err *e)
{
    struct homes *h = sys_calloc(1, sizeof *h);
    if (h == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to say where models are");
    int r = parse(STATE, words->state, &h->state, e);
    if (r == SHD_OK)
        r = parse(PUBLISH, words->publish, &h->publish, e);
    if (r == SHD_OK)
        r = parse(SNAPSHOTS, words->snapshots, &h->snapshots, e);
    if (r == SHD_OK)
        r = pager_new(&h->pager, e);
    if (r == SHD_OK)
        *ret_homes = h;
    else
        free(h);
    return r;
}

static int check(const struct segment_home *home, const char *flag, bool successor,
                 struct shd_err *e)
{
    bool is_memory = false;
    const int r = segment_home_check(home, &is_memory, e);
    if (r == SHD_OK && is_memory)
        log_warn("op=start flag=%s dir=%s why=\"its file system is memory itself (tmpfs)\" "
                 "do=\"name a directory on a disk, or say memory\"",
                 flag, home->dir);
    if (r == SHD_OK)
        return r;
    if (!successor)
        return err_prefix(e, "%s", flag);
    log_warn("op=start flag=%s status=%s why=\"%s\" do=\"mend it: what is kept goes on, nothing "
             "new can be made there\"",
             flag, status_name(r), e->text);
    return SHD_OK;
}

int homes_check(const struct homes *h, const char *device, bool successor, struct shd_err *e)
{
    if ((h->state.file || h->publish.file) && device != NULL)
        return err_set(e, SHD_EINVAL, "%s file: is of host devices, %s has memory of its own",
                       h->state.file ? STATE : PUBLISH, device);
    int r = check(&h->state, STATE, successor, e);
    if (r == SHD_OK)
        r = check(&h->publish, PUBLISH, successor, e);
    return r == SHD_OK ? check(&h->snapshots, SNAPSHOTS, successor, e) : r;
}

void homes_stop(struct homes *h)
{
    if (h != NULL)
        pager_stop(h->pager);
}

void homes_free(struct homes *h)
{
    if (h != NULL)
        pager_free(h->pager);
    free(h);
}

const struct segment_home *homes_state(const struct homes *h)
{
    return h != NULL ? &h->state : NULL;
}

const struct segment_home *homes_publish(const struct homes *h)
{
    return h != NULL ? &h->publish : NULL;
}

const struct segment_home *homes_snapshots(const struct homes *h)
{
    return h != NULL ? &h->snapshots : NULL;
}

struct pager *homes_pager(const struct homes *h)
{
    return h != NULL ? h->pager : NULL;
}
