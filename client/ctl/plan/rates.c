/* See rates.h. */
#include "client/ctl/plan/rates.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <jansson.h>

#include "client/ctl/base/verb.h"
#include "proto/base/check.h"
#include "proto/base/dtype.h"
#include "proto/base/sys.h"
#include "proto/base/version.h"

#define SCHEMA          1
#define FILE_BYTES_MAX  ((size_t)64 * 1024)
#define PROCESSOR_BYTES 128u

static const enum shd_dtype dtypes[PLAN_DTYPES] = { SHD_F32, SHD_BF16, SHD_F16 };

static const struct {
    const char *name;
    size_t at;
} numbers[] = {
    { "processors", offsetof(struct plan_rates, processors) },
    { "near_bytes", offsetof(struct plan_rates, near_bytes) },
    { "far_bytes", offsetof(struct plan_rates, far_bytes) },
    { "wake_ns", offsetof(struct plan_rates, wake_ns) },
    { "send_ns", offsetof(struct plan_rates, send_ns) },
    { "op_ns", offsetof(struct plan_rates, op_ns) },
    { "return_ns", offsetof(struct plan_rates, return_ns) },
    { "kernel_ns", offsetof(struct plan_rates, kernel_ns) },
    { "commit_ns", offsetof(struct plan_rates, commit_ns) },
    { "threads_share", offsetof(struct plan_rates, threads_share) },
};

/* By dtype: nanoseconds an element of a model in caches, and in memory. */
static const struct {
    const char *name;
    size_t at;
} tables[] = {
    { "sum_first", offsetof(struct plan_rates, first) },
    { "sum_next", offsetof(struct plan_rates, next) },
    { "stage", offsetof(struct plan_rates, stage) },
    { "fetch", offsetof(struct plan_rates, fetch) },
    { "update_adamw", offsetof(struct plan_rates, update[SPEC_ADAMW - 1]) },
    { "update_sgd", offsetof(struct plan_rates, update[SPEC_SGD - 1]) },
    { "update_lion", offsetof(struct plan_rates, update[SPEC_LION - 1]) },
    { "update_adamw_torch", offsetof(struct plan_rates, update[SPEC_ADAMW_TORCH - 1]) },
    { "update_sgd_torch", offsetof(struct plan_rates, update[SPEC_SGD_TORCH - 1]) },
};

/* As /proc/cpuinfo has it. */
static void find_processor(char name[PROCESSOR_BYTES])
{
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "re");
    snprintf(name, PROCESSOR_BYTES, "unknown");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL)
            continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(name, PROCESSOR_BYTES, "%s", colon + 1 + strspn(colon + 1, " "));
        break;
    }
    if (f != NULL)
        fclose(f);
}

int rates_path(const char *given, char path[RATES_PATH_BYTES], struct shd_err *e)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n;
    if (given != NULL)
        n = snprintf(path, RATES_PATH_BYTES, "%s", given);
    else if (cache != NULL && cache[0] == '/') /* the XDG rule: others are to be ignored */
        n = snprintf(path, RATES_PATH_BYTES, "%s/shardd/rates.json", cache);
    else if (home != NULL && home[0] == '/')
        n = snprintf(path, RATES_PATH_BYTES, "%s/.cache/shardd/rates.json", home);
    else
        return err_set(e, SHD_ENOENT,
                       "no place for rates: set $XDG_CACHE_HOME or $HOME, or give --rates FILE");
    if (n < 0 || (size_t)n >= RATES_PATH_BYTES)
        return err_set(e, SHD_ERANGE, "the path of the rates is longer than %u bytes",
                       RATES_PATH_BYTES);
    return SHD_OK;
}

/* -- Reading ----------------------------------------------------------------------------------- */

static int take_number(const json_t *rates, const char *name, double *ret_number, struct shd_err *e)
{
    const json_t *v = json_object_get(rates, name);
    const double x = json_number_value(v);
    if (!json_is_number(v) || !isfinite(x) || x < 0)
        return err_set(e, SHD_EINVAL, "rates.%s is no number from 0 on", name);
    *ret_number = x;
    return SHD_OK;
}

static int take_table(const json_t *rates, const char *name, struct plan_rate *ret_table,
                      struct shd_err *e)
{
    for (uint32_t d = 0; d < PLAN_DTYPES; d++) {
        const char *dtype = dtype_name(dtypes[d]);
        const json_t *pair = json_object_get(json_object_get(rates, name), dtype);
        const double near = json_number_value(json_array_get(pair, 0));
        const double far = json_number_value(json_array_get(pair, 1));
        if (json_array_size(pair) != 2 || !isfinite(near + far) || near < 0 || far < 0)
            return err_set(e, SHD_EINVAL, "rates.%s.%s is no pair of numbers from 0 on", name,
                           dtype);
        ret_table[d] = (struct plan_rate){ near, far };
    }
    return SHD_OK;
}

static int take_rates(const json_t *rates, struct plan_rates *ret_rates, struct shd_err *e)
{
    struct plan_rates got = { 0 };
    int r = SHD_OK;
    for (size_t i = 0; r == SHD_OK && i < ARRAY_SIZE(numbers); i++)
        r = take_number(rates, numbers[i].name, (double *)((char *)&got + numbers[i].at), e);
    for (size_t i = 0; r == SHD_OK && i < ARRAY_SIZE(tables); i++)
        r = take_table(rates, tables[i].name, (struct plan_rate *)((char *)&got + tables[i].at), e);
    if (r == SHD_OK &&
        (got.processors < 1 || got.near_bytes < 1 || got.far_bytes <= got.near_bytes))
        r = err_set(e, SHD_EINVAL,
                    "rates.processors or the sizes of the measured models are wrong");
    if (r == SHD_OK)
        *ret_rates = got;
    return r;
}

static const char *text_of(const json_t *root, const char *name)
{
    const char *text = json_string_value(json_object_get(root, name));
    return text != NULL ? text : "";
}

/* Rates of another machine are worse than none. */
static int check_origin(const json_t *root, struct shd_err *e)
{
    char processor[PROCESSOR_BYTES];
    const char *version = text_of(root, "version"), *of = text_of(root, "processor");
    const json_int_t count = json_integer_value(json_object_get(root, "processors"));
    find_processor(processor);
    if (json_integer_value(json_object_get(root, "schema")) != SCHEMA)
        return err_set(e, SHD_EINVAL, "not rates of schema %d", SCHEMA);
    if (strcmp(version, SHARDD_VERSION) != 0)
        return err_set(e, SHD_EINVAL,
                       "measured with version %.20s, this is " SHARDD_VERSION
                       ": measure again with shardctl plan --calibrate",
                       version);
    if (strcmp(of, processor) != 0 || count != (json_int_t)sys_processors())
        return err_set(e, SHD_EINVAL,
                       "measured on %d x %.60s, here are %u x %.60s: measure again with "
                       "shardctl plan --calibrate",
                       (int)count, of, (unsigned)sys_processors(), processor);
    return SHD_OK;
}

int rates_load(const char *path, struct plan_rates *ret_rates, char ret_date[RATES_DATE_BYTES],
               struct shd_err *e)
{
    char *text = NULL;
    size_t bytes;
    json_error_t why;
    int r = verb_file(path, FILE_BYTES_MAX, &text, &bytes, e);
    if (r != SHD_OK)
        return r;
    json_t *root = json_loadb(text, bytes, 0, &why);
    free(text);
    if (root == NULL)
        return err_set(e, SHD_EINVAL, "%s: line %d: %s", path, why.line, why.text);
    r = check_origin(root, e);
    if (r == SHD_OK)
        r = take_rates(json_object_get(root, "rates"), ret_rates, e);
    if (r == SHD_OK)
        snprintf(ret_date, RATES_DATE_BYTES, "%.10s", text_of(root, "date"));
    json_decref(root);
    return r == SHD_OK ? r : err_prefix(e, "%s", path);
}

/* -- Writing ----------------------------------------------------------------------------------- */

static double rounded(double x) /* to what a person reads */
{
    char text[32];
    snprintf(text, sizeof text, "%.4g", x);
    return strtod(text, NULL);
}

static json_t *table_json(const struct plan_rate *table)
{
    json_t *root = json_object();
    for (uint32_t d = 0; d < PLAN_DTYPES; d++)
        json_object_set_new(
            root, dtype_name(dtypes[d]),
            json_pack("[f, f]", rounded(table[d].near_ns), rounded(table[d].far_ns)));
    return root;
}

static json_t *rates_json(const struct plan_rates *rates)
{
    char processor[PROCESSOR_BYTES], date[RATES_DATE_BYTES] = "";
    const time_t now = time(NULL);
    struct tm utc;
    json_t *values = json_object();
    find_processor(processor);
    if (gmtime_r(&now, &utc) != NULL)
        strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
        json_object_set_new(
            values, numbers[i].name,
            json_real(rounded(*(const double *)((const char *)rates + numbers[i].at))));
    for (size_t i = 0; i < ARRAY_SIZE(tables); i++)
        json_object_set_new(
            values, tables[i].name,
            table_json((const struct plan_rate *)((const char *)rates + tables[i].at)));
    return json_pack("{s:i, s:s, s:s, s:I, s:s, s:o}", "schema", SCHEMA, "version", SHARDD_VERSION,
                     "processor", processor, "processors", (json_int_t)sys_processors(), "date",
                     date, "rates", values);
}

static int make_parents(char *path, struct shd_err *e)
{
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        struct stat st;
        *slash = '\0';
        const int r = stat(path, &st) != 0 && mkdir(path, 0700) != 0
                          ? err_sys(e, SHD_EIO, "make '%s'", path)
                          : SHD_OK;
        *slash = '/';
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

int rates_save(const char *path, const struct plan_rates *rates, struct shd_err *e)
{
    char part[RATES_PATH_BYTES + 8], whole[RATES_PATH_BYTES];
    snprintf(whole, sizeof whole, "%s", path);
    snprintf(part, sizeof part, "%s.part", path);
    int r = make_parents(whole, e);
    if (r != SHD_OK)
        return r;
    json_t *root = rates_json(rates);
    if (root == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for JSON");
    if (json_dump_file(root, part, JSON_INDENT(2) | JSON_REAL_PRECISION(6)) != 0 ||
        rename(part, path) != 0)
        r = err_sys(e, SHD_EIO, "write '%s'", path);
    if (r != SHD_OK)
        unlink(part);
    json_decref(root);
    return r;
}
