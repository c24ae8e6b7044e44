/* See tensor_merge.h. */
#include "client/ctl/watch/tensor_merge.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/http.h"
#include "proto/share/tally.h"
#include "proto/spec/layout.h"

#define PART_BYTES_MAX ((size_t)32 * 1024)
#define PART_MS        10000u /* a daemon counts for 8 s at most */

struct merged {
    json_t *first; /* owned: the first part's document; the others' are of the same moment */
    struct tally tally;
    json_int_t parts;
    bool seen[SHD_OWNERS_MAX]; /* owners */
};

static bool unhex(const char *text, struct tally *ret_tally)
{
    uint8_t *bytes = (uint8_t *)ret_tally;
    if (text == NULL || strlen(text) != 2 * sizeof *ret_tally)
        return false;
    for (size_t i = 0; i < 2 * sizeof *ret_tally; i++) {
        const char c = text[i];
        const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0)
            return false;
        bytes[i / 2] = (uint8_t)(i % 2 == 0 ? digit << 4 : bytes[i / 2] | digit);
    }
    return true;
}

static json_int_t number(const json_t *o, const char *key)
{
    return json_integer_value(json_object_get(o, key));
}

static bool same_moment(const json_t *a, const json_t *b)
{
    static const char *const keys[] = { "owners", "step", "updates", "of_step", "groups" };
    bool same = true;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        same = same && number(a, keys[i]) == number(b, keys[i]);
    return same;
}

static int take_json(struct merged *m, const char *device, json_t *part, struct shd_err *e)
{
    struct tally tally;
    const json_int_t elems = number(part, "elems"), owner = number(part, "owner");
    if (!unhex(json_string_value(json_object_get(part, "tally")), &tally) || elems < 0 ||
        !tally_check(&tally, (uint64_t)elems) || owner < 0 || owner >= SHD_OWNERS_MAX ||
        m->seen[owner])
        return err_set(e, SHD_EPROTO, "%s answers with what is no part of a tensor", device);
    if (m->first != NULL && !same_moment(m->first, part))
        return err_set(e, SHD_ESTEP,
                       "%s is at step %" JSON_INTEGER_FORMAT ", others at %" JSON_INTEGER_FORMAT
                       ": ask again",
                       device, number(part, "step"), number(m->first, "step"));
    if (m->first == NULL)
        m->first = json_incref(part);
    tally_merge(&m->tally, &tally);
    m->seen[owner] = true;
    m->parts++;
    return SHD_OK;
}

static int take(struct merged *m, const struct node_daemon *d, struct shd_err *e)
{
    if (d->http == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to ask %s", d->device);
    if (d->http->state != HTTP_DONE)
        return err_set(e, SHD_ENOENT, "%s: %s", d->device, d->http->err.text);
    json_t *part = json_loadb(d->http->body, d->http->body_bytes, 0, NULL);
    const int r = take_json(m, d->device, part, e);
    json_decref(part);
    return r;
}

static json_t *real_or_null(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static int write_text(struct merged *m, char **ret_text, struct shd_err *e)
{
    static const char *const own[] = { "owner", "tally", "update_ratio" };
    const struct tally *t = &m->tally;
    json_t *o = m->first;
    const bool update = json_object_get(o, "update_ratio") != NULL;
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        json_object_del(o, own[i]);
    json_object_set_new(o, "elems", json_integer((json_int_t)t->elems));
    json_object_set_new(o, "zeros", json_integer((json_int_t)t->zeros));
    json_object_set_new(o, "nan", json_integer((json_int_t)t->nans));
    json_object_set_new(o, "inf", json_integer((json_int_t)t->infs));
    json_object_set_new(o, "min", real_or_null(t->min));
    json_object_set_new(o, "max", real_or_null(t->max));
    json_object_set_new(o, "mean", real_or_null(tally_mean(t)));
    json_object_set_new(o, "rms", real_or_null(tally_rms(t)));
    if (update)
        json_object_set_new(o, "update_ratio", real_or_null(tally_ratio(t)));
    *ret_text = json_dumps(o, JSON_COMPACT);
    return *ret_text != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "no memory for a tensor");
}

int tensor_merge_ask(struct node *n, const char *query, char **ret_text, struct shd_err *e)
{
    struct merged m = { .parts = 0 };
    char target[1024], path[NODE_SOCKET_BYTES];
    int r = SHD_OK;
    tally_init(&m.tally);
    snprintf(target, sizeof target, "/tensor?%s", query);
    for (uint32_t i = 0; i < n->count; i++) {
        node_socket(n, &n->daemons[i], path);
        n->daemons[i].http = http_start(&n->client, path, target, PART_BYTES_MAX, PART_MS);
    }
    http_client_run(&n->client);
    for (uint32_t i = 0; i < n->count; i++) {
        struct node_daemon *d = &n->daemons[i];
        if (r == SHD_OK)
            r = take(&m, d, e);
        http_free(d->http);
        d->http = NULL;
    }
    if (r == SHD_OK && (m.first == NULL || m.parts != number(m.first, "owners")))
        r = err_set(e, SHD_ENOENT, "%" JSON_INTEGER_FORMAT " daemons are here, not all owners",
                    m.parts);
    if (r == SHD_OK)
        r = write_text(&m, ret_text, e);
    json_decref(m.first);
    return r;
}
