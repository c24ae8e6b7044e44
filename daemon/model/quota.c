/* See quota.h. */
#include "daemon/model/quota.h"

#include <errno.h>
#include <grp.h>
#include <inttypes.h>
#include <pthread.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/flags.h"
#include "proto/base/sys.h"

#define NAME_BYTES 128u /* of a model */

struct quota_use {
    struct quota *quota; /* borrowed */
    struct quota_use *next;
    struct quota_maker maker;
    uint32_t refs;
    uint64_t bytes;
    char name[NAME_BYTES];
};

struct quota {
    pthread_mutex_t lock;
    struct quota_config config;
    struct quota_use *uses; /* list */
};

/* -- Words --------------------------------------------------------------------------------------
 */

static int err_rule(const char *text, const char *why, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL,
                   "--quota '%.80s' %s: WHO=BYTES, as uid:1000=8GiB, gid:team=64GiB or uid:*=8GiB",
                   text, why);
}

static int find_id(const char *text, const char *name, enum quota_of of, uint32_t *ret_id,
                   struct shd_err *e)
{
    char *end;
    errno = 0;
    const unsigned long long number = strtoull(name, &end, 10);
    if (name[0] >= '0' && name[0] <= '9' && *end == '\0') {
        if (errno != 0 || number >= UINT32_MAX)
            return err_rule(text, "has no such number", e);
        *ret_id = (uint32_t)number;
        return SHD_OK;
    }
    const struct passwd *user = of == QUOTA_UID ? getpwnam(name) : NULL;
    const struct group *group = of == QUOTA_GID ? getgrnam(name) : NULL;
    if (user == NULL && group == NULL)
        return err_rule(text, of == QUOTA_UID ? "names no user here" : "names no group here", e);
    *ret_id = user != NULL ? user->pw_uid : group->gr_gid;
    return SHD_OK;
}

/* The start of a process: getpwnam() is for one thread. */
int quota_parse(const char *text, struct quota_config *config, struct shd_err *e)
{
    struct quota_rule rule = { .of = QUOTA_UID };
    struct shd_err why = { 0 };
    const char *value = strrchr(text, '=');
    const size_t bytes = value != NULL ? (size_t)(value - text) : 0;
    if (bytes < 5 || bytes >= sizeof rule.who)
        return err_rule(text, "is no rule", e);
    if (config->count == QUOTA_RULES_MAX)
        return err_set(e, SHD_ERANGE, "--quota is given more than %u times", QUOTA_RULES_MAX);
    memcpy(rule.who, text, bytes);
    if (strncmp(rule.who, "gid:", 4) == 0)
        rule.of = QUOTA_GID;
    else if (strncmp(rule.who, "uid:", 4) != 0)
        return err_rule(text, "is neither of a uid: nor of a gid:", e);
    rule.each = strcmp(rule.who + 4, "*") == 0;
    int r = rule.each ? SHD_OK : find_id(text, rule.who + 4, rule.of, &rule.id, e);
    if (r != SHD_OK)
        return r;
    if (flags_bytes(value + 1, &rule.bytes, &why) != SHD_OK)
        return err_rule(text, why.text, e);
    for (uint32_t i = 0; i < config->count; i++) {
        const struct quota_rule *other = &config->rules[i];
        if (other->of == rule.of && other->each == rule.each && other->id == rule.id)
            return err_rule(text, "is given twice", e);
    }
    config->rules[config->count++] = rule;
    return SHD_OK;
}

void quota_models(uint64_t bytes, struct quota_config *config)
{
    CHECK(config->count < QUOTA_RULES_MAX);
    struct quota_rule *rule = &config->rules[config->count++];
    *rule = (struct quota_rule){ .of = QUOTA_MODEL, .each = true, .bytes = bytes };
    memcpy(rule->who, "model", sizeof "model");
}

/* -- Who ----------------------------------------------------------------------------------------
 */

static uint32_t id_of(const struct quota_maker *maker, enum quota_of of)
{
    return of == QUOTA_UID ? maker->uid : maker->gid;
}

/* The rule of this kind that the maker is under: its own, or that of each; NULL: none. */
static const struct quota_rule *find_rule(const struct quota *q, const struct quota_maker *maker,
                                          enum quota_of of)
{
    const struct quota_rule *each = NULL;
    if (of != QUOTA_MODEL && !maker->known)
        return NULL;
    for (uint32_t i = 0; i < q->config.count; i++) {
        const struct quota_rule *rule = &q->config.rules[i];
        if (rule->of == of && !rule->each && rule->id == id_of(maker, of))
            return rule;
        if (rule->of == of && rule->each)
            each = rule;
    }
    return each;
}

static uint64_t sum_of(const struct quota *q, enum quota_of of, uint32_t id)
{
    uint64_t sum = 0;
    for (const struct quota_use *use = q->uses; use != NULL; use = use->next)
        if (use->maker.known && id_of(&use->maker, of) == id)
            sum += use->bytes;
    return sum;
}

/* "of gid:team", "of each uid, of which this is 1000". */
static const char *whose(const struct quota_rule *rule, const struct quota_maker *maker, char *text,
                         size_t bytes)
{
    if (rule->of == QUOTA_MODEL)
        snprintf(text, bytes, "of each model");
    else if (rule->each)
        snprintf(text, bytes, "of %s, here %" PRIu32, rule->who, id_of(maker, rule->of));
    else
        snprintf(text, bytes, "of %s", rule->who);
    return text;
}

static int check_rule(const struct quota_use *use, enum quota_of of, uint64_t bytes,
                      const char *what, struct shd_err *e)
{
    const struct quota *q = use->quota;
    const struct quota_rule *rule = find_rule(q, &use->maker, of);
    char text[80];
    if (rule == NULL)
        return SHD_OK;
    const uint64_t used = of == QUOTA_MODEL ? use->bytes : sum_of(q, of, id_of(&use->maker, of));
    if (bytes <= rule->bytes && used <= rule->bytes - bytes)
        return SHD_OK;
    return err_set(e, SHD_ENOMEM,
                   "quota: %" PRIu64 " bytes for %s of model '%.60s' are asked for, %" PRIu64
                   " are used, %" PRIu64 " is the limit %s",
                   bytes, what, use->name, used, rule->bytes,
                   whose(rule, &use->maker, text, sizeof text));
}

/* -- Counting -----------------------------------------------------------------------------------
 */

int quota_new(const struct quota_config *config, struct quota **ret_quota, struct shd_err *e)
{
    struct quota *q = sys_calloc(1, sizeof *q);
    if (q == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for quotas");
    q->config = *config;
    CHECK(pthread_mutex_init(&q->lock, NULL) == 0);
    *ret_quota = q;
    return SHD_OK;
}

void quota_free(struct quota *q)
{
    if (q == NULL)
        return;
    CHECK(q->uses == NULL);
    pthread_mutex_destroy(&q->lock);
    free(q);
}

int quota_begin(struct quota *q, const struct quota_maker *maker, const char *name,
                struct quota_use **ret_use, struct shd_err *e)
{
    struct quota_use *use = sys_calloc(1, sizeof *use);
    if (use == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a model's quota");
    use->quota = q;
    use->maker = *maker;
    use->refs = 1;
    snprintf(use->name, sizeof use->name, "%s", name);
    pthread_mutex_lock(&q->lock);
    use->next = q->uses;
    q->uses = use;
    pthread_mutex_unlock(&q->lock);
    *ret_use = use;
    return SHD_OK;
}

void quota_end(struct quota_use *use)
{
    if (use == NULL)
        return;
    struct quota *q = use->quota;
    pthread_mutex_lock(&q->lock);
    const bool last = --use->refs == 0;
    struct quota_use **at = &q->uses;
    while (last && *at != use)
        at = &(*at)->next;
    if (last)
        *at = use->next;
    pthread_mutex_unlock(&q->lock);
    if (last)
        free(use);
}

struct quota_use *quota_ref(struct quota_use *use)
{
    pthread_mutex_lock(&use->quota->lock);
    use->refs++;
    pthread_mutex_unlock(&use->quota->lock);
    return use;
}

int quota_take(struct quota_use *use, uint64_t bytes, const char *what, struct shd_err *e)
{
    static const enum quota_of kinds[] = { QUOTA_MODEL, QUOTA_UID, QUOTA_GID };
    struct quota *q = use->quota;
    int r = SHD_OK;
    pthread_mutex_lock(&q->lock);
    for (size_t i = 0; r == SHD_OK && bytes > 0 && i < ARRAY_SIZE(kinds); i++)
        r = check_rule(use, kinds[i], bytes, what, e);
    if (r == SHD_OK)
        use->bytes += bytes;
    pthread_mutex_unlock(&q->lock);
    return r;
}

void quota_have(struct quota_use *use, uint64_t bytes)
{
    pthread_mutex_lock(&use->quota->lock);
    use->bytes += bytes;
    pthread_mutex_unlock(&use->quota->lock);
}

void quota_give(struct quota_use *use, uint64_t bytes)
{
    pthread_mutex_lock(&use->quota->lock);
    CHECK(use->bytes >= bytes);
    use->bytes -= bytes;
    pthread_mutex_unlock(&use->quota->lock);
}

void quota_settle(struct quota_use *use, uint64_t asked, uint64_t got)
{
    if (got > asked)
        quota_have(use, got - asked);
    else
        quota_give(use, asked - got);
}

/* -- Looking ------------------------------------------------------------------------------------
 */

uint64_t quota_used(const struct quota_use *use)
{
    pthread_mutex_lock(&use->quota->lock);
    const uint64_t bytes = use->bytes;
    pthread_mutex_unlock(&use->quota->lock);
    return bytes;
}

struct quota_maker quota_maker_of(const struct quota_use *use)
{
    return use->maker;
}

/* A user, or group, that only a rule of each is about. */
static void show_each(const struct quota *q, const struct quota_rule *rule,
                      struct quota_shown *shown, uint32_t *count)
{
    for (const struct quota_use *use = q->uses; use != NULL; use = use->next) {
        const uint32_t id = id_of(&use->maker, rule->of);
        struct quota_shown row = { .limit = rule->bytes };
        bool seen = !use->maker.known || find_rule(q, &use->maker, rule->of) != rule;
        snprintf(row.who, sizeof row.who, "%.4s%" PRIu32, rule->who, id);
        for (uint32_t i = 0; !seen && i < *count; i++)
            seen = strcmp(shown[i].who, row.who) == 0;
        if (seen || *count == QUOTA_SHOWN_MAX)
            continue;
        row.used = sum_of(q, rule->of, id);
        shown[(*count)++] = row;
    }
}

static uint64_t most_of(const struct quota *q)
{
    uint64_t most = 0;
    for (const struct quota_use *use = q->uses; use != NULL; use = use->next)
        if (use->bytes > most)
            most = use->bytes;
    return most;
}

uint32_t quota_show(struct quota *q, struct quota_shown ret_shown[QUOTA_SHOWN_MAX])
{
    uint32_t count = 0;
    pthread_mutex_lock(&q->lock);
    for (uint32_t i = 0; i < q->config.count && count < QUOTA_SHOWN_MAX; i++) {
        const struct quota_rule *rule = &q->config.rules[i];
        if (rule->each && rule->of != QUOTA_MODEL) {
            show_each(q, rule, ret_shown, &count);
            continue;
        }
        struct quota_shown *row = &ret_shown[count++];
        *row = (struct quota_shown){ .used = rule->of == QUOTA_MODEL
                                                 ? most_of(q)
                                                 : sum_of(q, rule->of, rule->id),
                                     .limit = rule->bytes };
        memcpy(row->who, rule->who, sizeof row->who);
    }
    pthread_mutex_unlock(&q->lock);
    return count;
}
