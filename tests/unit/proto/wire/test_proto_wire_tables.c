/* wire_tables: a row for each field of shd.proto, in its place and as wide. */
#include "proto/wire/wire_tables.h"

#include "tests/lib/test.h"

static uint32_t width_of(const ProtobufCFieldDescriptor *d)
{
    if (d->label == PROTOBUF_C_LABEL_REPEATED)
        return 0;
    switch (d->type) {
    case PROTOBUF_C_TYPE_BOOL:
        return 1;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FLOAT:
        return 4;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_DOUBLE:
    case PROTOBUF_C_TYPE_STRING:
        return 8;
    default:
        return 0;
    }
}

static void expect_table(const struct wire_message *t, const ProtobufCMessageDescriptor *d)
{
    EXPECT(t->descriptor == d && t->field_count == d->n_fields);
    EXPECT(d->sizeof_message <= sizeof((struct wire_parts *)NULL)->body);
    bool nests = false;
    for (uint32_t i = 0; i < t->field_count; i++) {
        const struct wire_field *row = &t->fields[i];
        const bool message = d->fields[i].type == PROTOBUF_C_TYPE_MESSAGE;
        if (strcmp(row->name, d->fields[i].name) != 0 && !message)
            FAIL("row %" PRIu32 " of %s is %s, the field is %s", i, t->name, row->name,
                 d->fields[i].name);
        EXPECT_EQ(row->width, width_of(&d->fields[i]));
        EXPECT(message == (row->of != NULL));
        if (!message)
            continue;
        nests = true;
        EXPECT(!row->of->nests);
        expect_table(row->of, d->fields[i].descriptor);
    }
    EXPECT_EQ(nests, t->nests);
}

static void expect_bodies(const struct wire_message *tables, const ProtobufCMessageDescriptor *d,
                          uint32_t types)
{
    for (uint32_t i = 0; i < types; i++) {
        const ProtobufCFieldDescriptor *body = protobuf_c_message_descriptor_get_field(d, 10 + i);
        EXPECT(body != NULL);
        expect_table(&tables[i], body->descriptor);
    }
    EXPECT(protobuf_c_message_descriptor_get_field(d, 10 + types) == NULL);
}

TEST(tables_are_those_of_the_descriptors)
{
    expect_bodies(wire_requests, &shd__request__descriptor, WIRE_REQUEST_TYPES);
    expect_bodies(wire_replies + WIRE_WELCOME, &shd__reply__descriptor,
                  WIRE_REPLY_TYPES - WIRE_WELCOME);
}

TEST_MAIN()
