/* See keeper.h. */
#include "daemon/base/keeper.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>

#include "daemon/base/homes.h"
#include "daemon/base/log.h"
#include "daemon/base/manager.h"
#include "daemon/base/pager.h"
#include "daemon/base/removals.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/segment_file.h"

#define WAIT_US     (10 * US_PER_S)
#define PROGRESS_US UINT64_C(300000000) /* TimeoutStartSec= of the unit says the same */
#define INSTANCE_AT 1u                  /* after the 'm' */
#define PART_AT     17u                 /* after its digits */

static const char *const part_names[KEEPER_PARTS] = {
    [KEEPER_LEDGER] = "-ledger",
    [KEEPER_STATE] = "-state",
    [KEEPER_SPILL] = "-spill",
    [KEEPER_SPARE] = "-spare",
    [KEEPER_NEXT] = "-next",
    [KEEPER_PUT] = "-put",
    [KEEPER_COMMON] = "-common",
    [KEEPER_MOVED] = "-moved",
    "-snap0",
    "-snap1",
    "-snap2",
    "-snap3",
    "-snap4",
    "-snap5",
    "-snap6",
    "-snap7",
};

static void make_name(char name[REMOVALS_NAME_BYTES], uint64_t instance, enum keeper_part part)
{
    snprintf(name, REMOVALS_NAME_BYTES, "m%016" PRIx64 "%s", instance, part_names[part]);
}

/* False: the name is none of ours. */
static bool parse_name(const char *name, uint64_t *ret_instance, enum keeper_part *ret_part)
{
    if (name[0] != 'm' || strspn(name + INSTANCE_AT, "0123456789abcdef") != PART_AT - INSTANCE_AT)
        return false;
    for (int part = 0; part < KEEPER_PARTS; part++) {
        if (strcmp(name + PART_AT, part_names[part]) != 0)
            continue;
        *ret_instance = strtoull(name + INSTANCE_AT, NULL, 16);
        *ret_part = (enum keeper_part)part;
        return true;
    }
    return false;
}

static struct keeper_group *group_of(struct keeper *k, uint64_t instance)
{
    for (uint32_t i = 0; i < k->group_count; i++)
        if (k->groups[i].instance == instance)
            return &k->groups[i];
    struct keeper_group *g = &k->groups[k->group_count++];
    *g = (struct keeper_group){ .instance = instance };
    for (int part = 0; part < KEEPER_PARTS; part++)
        g->fd[part] = -1;
    return g;
}

static void take_one(struct keeper *k, int fd, const char *name)
{
    uint64_t instance;
    enum keeper_part part;
    if (parse_name(name, &instance, &part)) {
        struct keeper_group *g = group_of(k, instance);
        if (g->fd[part] < 0) {
            g->fd[part] = fd;
            return;
        }
    }
    log_warn("op=adopt fd=%d name=%.64s why=\"no name of ours, or a second one: left alone\""
             " do=\"if no other version of shardd runs here, drain and start again\"",
             fd, name);
    k->unknown[k->unknown_count++] = fd;
}

static int take_all(struct keeper *k, uint32_t count, char **names, struct shd_err *e)
{
    k->groups = sys_calloc(count, sizeof *k->groups);
    k->unknown = sys_calloc(count, sizeof *k->unknown);
    if (k->groups == NULL || k->unknown == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " descriptors of the keeper", count);
    for (uint32_t i = 0; i < count; i++)
        take_one(k, SD_LISTEN_FDS_START + (int)i, names[i]);
    return SHD_OK;
}

int keeper_init(struct keeper *k, uv_loop_t *loop, const struct homes *homes, struct shd_err *e)
{
    char **names = NULL;
    *k = (struct keeper){ .notify = manager_is_there(), .wait_us = WAIT_US, .homes = homes };
    const int count = sd_listen_fds_with_names(/* unset_environment= */ 1, &names);
    if (count < 0)
        return err_set(e, SHD_EIO, "take the keeper's descriptors: %s", strerror(-count));
    int r = count > 0 ? take_all(k, (uint32_t)count, names, e) : SHD_OK;
    for (int i = 0; i < count; i++)
        free(names[i]);
    free(names);
    if (r == SHD_OK && k->notify)
        r = removals_new(loop, k->wait_us, &k->removals, e);
    if (!k->notify)
        log_info("op=start keeper=none why=\"NOTIFY_SOCKET is not set: state ends with this "
                 "process\"");
    return r;
}

void keeper_forget(struct keeper_group *g)
{
    for (int part = 0; part < KEEPER_PARTS; part++) {
        if (g->fd[part] >= 0)
            close(g->fd[part]);
        g->fd[part] = -1;
    }
}

void keeper_stop(const struct keeper *k)
{
    removals_stop(k->removals);
}

void keeper_deinit(struct keeper *k)
{
    for (uint32_t i = 0; i < k->group_count; i++)
        keeper_forget(&k->groups[i]);
    for (uint32_t i = 0; i < k->unknown_count; i++)
        close(k->unknown[i]);
    free(k->groups);
    free(k->unknown);
    removals_free(k->removals);
    *k = (struct keeper){ 0 };
}

const char *keeper_name(const struct keeper *k)
{
    return k->notify ? "notify" : "none";
}

static void add_removal(const struct keeper *k, uint64_t instance, enum keeper_part part)
{
    char name[REMOVALS_NAME_BYTES];
    make_name(name, instance, part);
    removals_add(k->removals, name);
}

static int not_taken(const struct keeper *k, const char *name, int why, struct shd_err *e)
{
    if (why == EAGAIN || why == ETIMEDOUT)
        return err_set(e, SHD_ETIMEDOUT,
                       "the service manager has not taken '%s' within %" PRIu64 " s", name,
                       k->wait_us / US_PER_S);
    return err_set(e, SHD_EIO, "store '%s' with the service manager: %s", name, strerror(why));
}

int keeper_store(const struct keeper *k, uint64_t instance, enum keeper_part part, int fd,
                 struct shd_err *e)
{
    char name[REMOVALS_NAME_BYTES], text[REMOVALS_NAME_BYTES + 64];
    CHECK(fd >= 0);
    if (!k->notify)
        return SHD_OK;
    make_name(name, instance, part);
    snprintf(text, sizeof text, "FDSTORE=1\nFDNAME=%s\nFDPOLL=0", name);
    if (!removals_send(k->removals, k->wait_us)) /* one of this name may be among them */
        return not_taken(k, name, EAGAIN, e);
    FAIL_POINT("keeper:store:before");
    int why = manager_tell(text, fd, k->wait_us);
    if (why != 0)
        return not_taken(k, name, why, e);
    why = manager_barrier(k->wait_us);
    if (why != 0) {
        add_removal(k, instance, part); /* should the manager come to it later */
        removals_send(k->removals, /* wait_us= */ 0);
        return not_taken(k, name, why, e);
    }
    FAIL_POINT("keeper:store:after");
    return SHD_OK;
}

void keeper_remove(const struct keeper *k, uint64_t instance)
{
    static const enum keeper_part order[] = { KEEPER_PUT,   KEEPER_NEXT,  KEEPER_SPARE,
                                              KEEPER_SPILL, KEEPER_STATE, KEEPER_COMMON,
                                              KEEPER_LEDGER };
    for (int i = 0; i < KEEPER_SNAPSHOTS; i++)
        add_removal(k, instance, (enum keeper_part)(KEEPER_SNAPSHOT + i));
    for (size_t i = 0; i < ARRAY_SIZE(order); i++)
        add_removal(k, instance, order[i]);
    removals_send(k->removals, k->wait_us);
}

void keeper_remove_part(const struct keeper *k, uint64_t instance, enum keeper_part part)
{
    add_removal(k, instance, part);
    removals_send(k->removals, /* wait_us= */ 0);
}

/* NULL: it is in memory. */
static const char *dir_of(const struct keeper *k, enum keeper_part part)
{
    const struct segment_home *home = part == KEEPER_STATE      ? homes_state(k->homes)
                                      : part == KEEPER_NEXT     ? homes_publish(k->homes)
                                      : part >= KEEPER_SNAPSHOT ? homes_snapshots(k->homes)
                                                                : NULL;
    return home != NULL && home->file ? home->dir : NULL;
}

bool keeper_on_file(const struct keeper *k, enum keeper_part part)
{
    return dir_of(k, part) != NULL;
}

_Static_assert(KEEPER_HOME_BYTES >= sizeof "file:" + SEGMENT_DIR_BYTES, "a home's text fits");

const char *keeper_home(const struct keeper *k, enum keeper_part part, char buf[KEEPER_HOME_BYTES])
{
    const char *dir = dir_of(k, part);
    snprintf(buf, KEEPER_HOME_BYTES, "%s%s", dir != NULL ? "file:" : "memory",
             dir != NULL ? dir : "");
    return buf;
}

int keeper_segment_new(const struct keeper *k, enum keeper_part part, enum segment_kind kind,
                       uint64_t bytes, struct segment *ret_segment, struct shd_err *e)
{
    const char *dir = dir_of(k, part);
    char name[REMOVALS_NAME_BYTES];
    if (dir != NULL)
        return segment_file_new(dir, kind, bytes, ret_segment, e);
    snprintf(name, sizeof name, "shardd%s",
             part < KEEPER_SNAPSHOT ? part_names[part] : "-snapshot");
    return segment_new(name, kind, bytes, ret_segment, e);
}

int keeper_room_new(const struct keeper *k, enum keeper_part part, enum segment_kind kind,
                    uint64_t bytes, int *ret_fd, struct shd_err *e)
{
    return segment_file_room(dir_of(k, part), kind, bytes, ret_fd, e);
}

int keeper_room_lend(int fd, enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                     struct shd_err *e)
{
    return segment_file_lend(fd, kind, bytes, ret_segment, e);
}

int keeper_segment_map(int fd, enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                       struct shd_err *e)
{
    return segment_kept_map(fd, kind, bytes, ret_segment, e);
}

void keeper_segment_behind(const struct keeper *k, const struct segment *s, uint64_t at,
                           uint64_t bytes)
{
    if (s->file)
        pager_behind(homes_pager(k->homes), s, at, bytes, /* done= */ NULL);
}

void keeper_segment_write(const struct keeper *k, const struct segment *s, uint64_t at,
                          uint64_t bytes)
{
    if (s->file)
        pager_write(homes_pager(k->homes), s, at, bytes);
}

void keeper_segment_close(const struct keeper *k, struct segment *s)
{
    pager_close(homes_pager(k->homes), s);
}

void keeper_wait(const struct keeper *k)
{
    if (removals_stopped(k->removals))
        return;
    if (!removals_send(k->removals, k->wait_us) || manager_barrier(k->wait_us) != 0)
        log_warn("op=keeper why=\"the service manager has not taken out what was dropped within "
                 "%" PRIu64 " s\" do=\"nothing: its memory is given back when it does\"",
                 k->wait_us / US_PER_S);
}

void keeper_progress(const char *fmt, ...)
{
    char text[256];
    const int used = snprintf(text, sizeof text,
                              "EXTEND_TIMEOUT_USEC=%" PRIu64 "\nSTATUS=", PROGRESS_US);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text + used, sizeof text - (size_t)used, fmt, ap);
    va_end(ap);
    manager_tell(text, /* fd= */ -1, WAIT_US);
}
