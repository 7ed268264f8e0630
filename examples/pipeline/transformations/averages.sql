CREATE MATERIALIZED VIEW averages AS
SELECT city, count(*) AS readings, avg(temperature) AS temperature FROM readings GROUP BY city
